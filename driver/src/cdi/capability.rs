//! What a file of the driver is for, in the words of `NVIDIA_DRIVER_CAPABILITIES`.
//!
//! The tables are those of libnvidia-container (`src/nvc_info.c`), with two differences that matter
//! to a capped share: OpenCL, which NVIDIA counts among `compute`, has a word of its own, since its
//! memory is not counted by the shim; and a library that no table knows is [`Capability::Other`].

use std::fmt;

/// A use of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Capability {
    /// CUDA.
    Compute,
    /// nvidia-smi and NVML.
    Utility,
    /// Video encoding and decoding: NVENC, NVDEC, VDPAU, optical flow.
    Video,
    /// OpenGL, Vulkan, OptiX; X11 and Wayland (`display`) need the same files.
    Graphics,
    /// NGX.
    Ngx,
    /// OpenCL.
    OpenCl,
    /// What no table knows.
    Other,
}

impl Capability {
    /// What a capped share has: the shim stands before these.
    pub const CAPPED: [Self; 2] = [Self::Compute, Self::Utility];

    /// What a capped share has only where policy says so.
    pub const EXTRA: [Self; 5] = [
        Self::Video,
        Self::Graphics,
        Self::Ngx,
        Self::OpenCl,
        Self::Other,
    ];

    /// As it is written.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Utility => "utility",
            Self::Video => "video",
            Self::Graphics => "graphics",
            Self::Ngx => "ngx",
            Self::OpenCl => "opencl",
            Self::Other => "other",
        }
    }

    /// That of a library with this file name: `libcuda.so.535.261.03`.
    #[must_use]
    pub fn of_library(name: &str) -> Self {
        let stem = stem(name);
        TABLE
            .iter()
            .find(|(_, stems)| stems.contains(&stem))
            .map_or(Self::Other, |(capability, _)| *capability)
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A library's file name without its version: `libcuda` of `libcuda.so.535.261.03`.
#[must_use]
pub fn stem(name: &str) -> &str {
    name.split(".so").next().unwrap_or(name)
}

const TABLE: [(Capability, &[&str]); 6] = [
    (
        Capability::Compute,
        &[
            "libcuda",
            "libcudadebugger",
            "libnvidia-allocator",
            "libnvidia-fatbinaryloader",
            "libnvidia-gpucomp",
            "libnvidia-nvvm",
            "libnvidia-nvvm70",
            "libnvidia-pkcs11",
            "libnvidia-pkcs11-openssl3",
            "libnvidia-ptxjitcompiler",
            "libnvidia-tileiras",
        ],
    ),
    (
        Capability::Utility,
        &[
            "libnvidia-cfg",
            "libnvidia-ml",
            "libnvidia-nscq",
            "libnvidia-sandboxutils",
            "libnvsdm",
        ],
    ),
    (
        Capability::Video,
        &[
            "libnvcuvid",
            "libnvidia-encode",
            "libnvidia-opticalflow",
            "libvdpau_nvidia",
        ],
    ),
    (
        Capability::Graphics,
        &[
            "libEGL_nvidia",
            "libGLESv1_CM_nvidia",
            "libGLESv2_nvidia",
            "libGLX_nvidia",
            "libnvidia-cbl",
            "libnvidia-egl-gbm",
            "libnvidia-egl-wayland",
            "libnvidia-egl-wayland2",
            "libnvidia-egl-xcb",
            "libnvidia-egl-xlib",
            "libnvidia-eglcore",
            "libnvidia-fbc",
            "libnvidia-glcore",
            "libnvidia-glsi",
            "libnvidia-glvkspirv",
            "libnvidia-gtk2",
            "libnvidia-gtk3",
            "libnvidia-ifr",
            "libnvidia-present",
            "libnvidia-rtcore",
            "libnvidia-tls",
            "libnvidia-vksc-core",
            "libnvidia-vulkan-producer",
            "libnvidia-wayland-client",
            "libnvoptix",
        ],
    ),
    (Capability::Ngx, &["libnvidia-ngx"]),
    (
        Capability::OpenCl,
        &["libnvidia-compiler", "libnvidia-opencl"],
    ),
];
