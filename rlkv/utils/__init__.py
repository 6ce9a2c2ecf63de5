"""Small helpers without a subject of their own: files, progress, provenance, figures."""
