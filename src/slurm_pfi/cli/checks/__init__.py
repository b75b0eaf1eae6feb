"""What ``slurm-pfi doctor`` looks at: functions on texts where possible; none changes anything or waits without end."""
