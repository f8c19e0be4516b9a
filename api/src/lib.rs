//! What the cluster sees of Tranche.
