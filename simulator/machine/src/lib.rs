//! The simulated machine's shared state.
