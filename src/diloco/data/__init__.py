"""Text on disk to batches of token windows: sources, tokenizer, shards, order.

    config.py       DataConfig: what the user may say about the data
    documents.py    the contract of a source; sources.py the registry; local.py, files.py, hub.py the sources
    passages.py     documents cut into passages; the fixed train/validation split
    tokenizer.py    text to tokens and back; tokenizer_files.py: where a tokenizer comes from
    corpus.py       a prepared corpus on disk: memory-mapped token shards and their counts
    shards.py       prepare(): source -> corpus, once, cached; building.py, writer.py: how, resumable
    clusters.py     shards of different kind
    permutation.py  a shuffle that is computed, not stored
    order.py        which windows a worker sees, and when: a pure function of (seed, shards, progress, position)

Nothing here imports torch, and this file imports nothing at all, so that `diloco --help` and the parent
process of the workers start at once.
"""
