"""Drawing for HTML pages: what a page shows is given."""
