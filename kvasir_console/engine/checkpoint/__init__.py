"""Checkpoints without torch: read and check a GGUF header, select windows and experts, cut shards, name contents.

``gguf`` opens a file, ``shape`` says what model it is, ``window`` selects, ``shard`` cuts and verifies, ``digest``
names, ``inspect`` summarises, ``upcycle`` makes a mixture of experts from a dense model.
"""
