"""The mathematics of HQMQ in plain torch: no graph, no kernel. The oracle of everything else."""
