"""Reports: pages, tables, published numbers."""
