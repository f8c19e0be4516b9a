//! The Container Device Interface, as much of it as we write, and minimal specs.
