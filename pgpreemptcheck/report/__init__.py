"""Reports: one module an output, each from the same evaluated inspection."""
