"""Problems with known answers, and the curriculum of those that a model already solves."""
