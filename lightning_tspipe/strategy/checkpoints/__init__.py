"""Checkpoints: files, folders of shards, checksums, and where a run goes on."""
