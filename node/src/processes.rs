//! The host's processes, as `/proc` shows them. There are three questions, and each needs its own source:
//!
//! | question | answered by | |
//! |---|---|---|
//! | which shares does a process use? | the account pages that it has mapped: exact, and the same in any namespace, with and without a container | [`accounts`] |
//! | to whom does a process belong? | the cgroup and the mounts that kubelet and runtime made: nothing that a tenant's program writes; it must end in a second, so long files are cut | [`owner`] |
//! | which processes may still use a claim's devices? | the mounts of every mount namespace, read to the end however long they are: the answer frees a device | [`containers`] |

pub mod accounts;
pub mod containers;
mod mountinfo;
pub mod owner;
