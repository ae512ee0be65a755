"""From a task to a scored group."""
