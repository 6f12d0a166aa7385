"""Parts of local SGD and of FSDP between hosts."""
