"""slurm-pfi: power caps for Slurm GPU jobs that hold a site limit and lose the least work."""

__version__ = "0.1.0"
