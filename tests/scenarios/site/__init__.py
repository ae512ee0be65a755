"""The documentation: the site that `make docs` builds, in a browser, and the commands of its pages."""
