"""What every file may use and that knows no objective: common (errors, flags, files, devices),
tokenizer, metrics, optimizer, processes (several GPUs) and sharding (--shard)."""
