"""Publications and checkpoints as bytes: `docs/publication-format.md` is normative.

`publication` and `index`, `manifest`, `shards` read a version; `rebuild` folds a chain of them
onto a `checkpoint`; `materialize` writes the result; `write`, `records` and `wire` are for writers.
"""
