"""Files on disks that fail, and failpoints."""
