"""Using gates: generation with a HeadReallocationCache, from Python and from the command line."""
