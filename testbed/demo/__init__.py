"""``make demo``: the main job on a real Slurm cluster whose GPUs are simulated, told and measured."""
