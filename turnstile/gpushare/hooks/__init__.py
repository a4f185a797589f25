"""GPU-share for decode loops that others run, one module an engine; nothing is imported until it is used."""
