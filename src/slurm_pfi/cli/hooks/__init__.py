"""``slurm-pfi hooks``: prolog and epilog into a site that has hooks of its own, and out again; no node drains.

``slurmd`` drains its node when a configured hook is missing, cannot be run, or a pattern matches no file. So a file is
there, whole and executable, before anything names it, and goes only after nothing does. slurm.conf is the site's:
what it needs is said, never written.
"""
