"""Pure parts and single processes, in folders that mirror the packages."""
