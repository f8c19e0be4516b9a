//! The share's pages and its account.
