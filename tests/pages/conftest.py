"""Files of `given` are those that a page's reader has; they are no tests."""

collect_ignore = ["given"]
