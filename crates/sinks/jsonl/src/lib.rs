//! Events as JSON lines, to a file or standard output.
