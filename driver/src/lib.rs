//! The GPU domain, pure and synchronous.
