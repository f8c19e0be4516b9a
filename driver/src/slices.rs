//! From inventory and policy to the ResourceSlices of one node.
