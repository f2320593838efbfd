"""Text on disk to batches of token windows: sources, tokenizer, shards, order.

    config.py       DataConfig: the options of the data
    sources/        documents from files, folders, the Python library or the Hugging Face hub
        formats.py, rows.py   the formats of files; a row as a document
    tokenizer.py    text to tokens and back; a tokenizer is trained, or loaded from a file, a folder or the hub
    corpus.py       a prepared corpus on disk: memory-mapped token shards and their counts
    preparation/    from a source to a corpus
        corpus_cache.py     prepare(): opens the cached corpus, or builds it once; lists and deletes cached ones
        builder.py          builds it, resumable; passages.py (train/validation split)
        partitions.py       which shard a passage goes to: i.i.d., by label, by cluster
        received_corpus.py  receives a corpus from other workers and checks it
    order.py        the batches of a worker: a pure function of (seed, shards, progress, position)

Nothing here imports torch, and this file imports nothing at all, so that `diloco --help` and the launcher start fast.
"""
