"""Files: atomic writers, the ledger of what was written, and checked readers."""
