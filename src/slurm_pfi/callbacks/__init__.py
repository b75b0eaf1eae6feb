"""Progress reports from training libraries: one module each, which loads its library when its class is first used."""
