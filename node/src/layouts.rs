//! Where NVIDIA's driver is on known systems: the data of the search, in the order of the search.
//!
//! A driver root is a folder of the host with the driver's files; for a driver from packages it is `/`. In it,
//! libraries and programs are in one of a few folders. Any root may have any of these folders, so a layout is a root
//! and those of the folders that exist in it:
//!
//! | system | root | libraries | programs | device nodes |
//! |---|---|---|---|---|
//! | packages (Debian, Ubuntu, RHEL, SLES, Arch) | `/` | `/usr/lib/<triplet>`, `/usr/lib64`, `/usr/lib` | `/usr/bin` | `/dev` |
//! | GPU operator's driver container | `/run/nvidia/driver` | as by packages | `/usr/bin` | below the root, else `/dev` |
//! | GKE (Container-Optimized OS) | `/home/kubernetes/bin/nvidia` | `/lib64` | `/bin` | `/dev` |
//! | Container-Optimized OS without GKE | `/var/lib/nvidia` | `/lib64` | `/bin` | `/dev` |
//! | inside a GKE or rented container | `/usr/local/nvidia` | `/lib64`, `/lib` | `/bin` | `/dev` |
//! | NixOS | `/` | `/run/opengl-driver/lib`, links into `/nix/store` | `/run/current-system/sw/bin` | `/dev` |
//! | Bottlerocket | `/` | `…/sys-root/usr/lib/nvidia/tesla` | `…/sys-root/usr/libexec/nvidia/tesla/bin` | `/dev` |
//!
//! Sources: `pkg/lookup/library.go` of nvidia-container-toolkit (packages), `docs/install.md` of NVIDIA's DRA driver
//! (`nvidiaDriverRoot` of the operator and of GKE), cos-gpu-installer (Container-Optimized OS), nixpkgs'
//! `nixos/modules/hardware/graphics.nix` and `services/hardware/nvidia-container-toolkit` (NixOS),
//! `kmod-6.12-nvidia-r580.spec` of bottlerocket-kernel-kit and the CDI specs in bottlerocket-core-kit's pull request
//! 879 (Bottlerocket).

/// The driver roots that are searched if none is given, in this order. Like in the GPU operator's validator, a driver
/// of the host comes before one from a container.
pub const ROOTS: [&str; 5] = [
    "/",
    "/run/nvidia/driver",
    "/home/kubernetes/bin/nvidia",
    "/var/lib/nvidia",
    "/usr/local/nvidia",
];

/// Where libraries are searched, from the root, in this order.
pub const LIBRARY_FOLDERS: [&str; 17] = [
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
    "/lib64",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/lib/x86_64-linux-gnu/nvidia/current",
    "/lib/aarch64-linux-gnu/nvidia/current",
    "/run/opengl-driver/lib",
    "/x86_64-bottlerocket-linux-gnu/sys-root/usr/lib/nvidia/tesla",
    "/aarch64-bottlerocket-linux-gnu/sys-root/usr/lib/nvidia/tesla",
    "/usr/lib/nvidia/tesla",
    // 64-bit libraries on Arch, and in roots such as /usr/local/nvidia; 32-bit libraries elsewhere, which are left out.
    "/usr/lib",
    "/lib",
    "/usr/local/lib",
];

/// Where programs are searched, from the root, in this order.
pub const PROGRAM_FOLDERS: [&str; 11] = [
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
    "/opt/bin",
    "/run/current-system/sw/bin",
    "/x86_64-bottlerocket-linux-gnu/sys-root/usr/libexec/nvidia/tesla/bin",
    "/aarch64-bottlerocket-linux-gnu/sys-root/usr/libexec/nvidia/tesla/bin",
    "/usr/libexec/nvidia/tesla/bin",
];

/// Where the firmware of a driver's version is searched, from the root, in this order; links to the same folder count
/// once.
pub const FIRMWARE_FOLDERS: [&str; 4] = [
    "/lib/firmware/nvidia",
    "/usr/lib/firmware/nvidia",
    "/run/current-system/firmware/nvidia",
    "/x86_64-bottlerocket-linux-gnu/sys-root/usr/lib/firmware/nvidia",
];
