"""The dashboard: a page that shows a pool at work, and the one stream of events behind it."""
