//! Events as signed HTTP requests.
