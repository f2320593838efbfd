"""Text on disk to batches of token windows: sources, tokenizer, shards, order.

    config.py       DataConfig: what the user may say about the data
    sources.py      the documents of a source, in a fixed order; the registry of sources
    passages.py     documents cut into passages; the fixed train/validation split
    tokenizer.py    the byte-level BPE: train, load, encode, decode
    corpus.py       a prepared corpus on disk: memory-mapped token shards and their counts
    shards.py       prepare(): source -> corpus, once, cached, atomic
    permutation.py  a shuffle that is computed, not stored
    order.py        which windows a worker sees, and when: a pure function of (seed, shards, progress, position)

Nothing here imports torch, and this file imports nothing at all, so that `diloco --help` and the parent
process of the workers start at once.
"""
