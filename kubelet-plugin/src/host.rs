//! The host's files: paths, writes that survive a power cut, the installation, SELinux labels.

pub mod fs;
pub mod install;
pub mod layout;
pub mod selinux;
