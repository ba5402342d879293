"""The library's caches behind a TesseraCache: one for each kind of layers."""
