"""The paper's experiments, as published and as private: `python -m benchmarks.paper.table1`."""
