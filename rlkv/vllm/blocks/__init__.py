"""Memory of the plugin: block groups, packing, buffers."""
