//! The purpose of each file of the driver, in the terms of `NVIDIA_DRIVER_CAPABILITIES`.
//!
//! The tables are those of libnvidia-container (`src/nvc_info.c`), with two differences for capped
//! shares: OpenCL, which NVIDIA includes in `compute`, is a capability of its own, because the shim
//! does not count its memory; and a library that is in no table is [`Capability::Other`].

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
    /// Libraries that are in no table.
    Other,
}

impl Capability {
    /// The capabilities of every capped share: the shim is in front of these.
    pub const CAPPED: [Self; 2] = [Self::Compute, Self::Utility];

    /// The capabilities that a capped share has only if the policy says so.
    pub const EXTRA: [Self; 5] = [
        Self::Video,
        Self::Graphics,
        Self::Ngx,
        Self::OpenCl,
        Self::Other,
    ];

    /// Its name.
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

    /// The capability of this name in a SharingPolicy or a GpuNode.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        match name {
            // X11 and Wayland need the files of OpenGL.
            "display" => Some(Self::Graphics),
            // A policy cannot name libraries that no table knows.
            "other" => None,
            _ => Self::CAPPED
                .into_iter()
                .chain(Self::EXTRA)
                .find(|capability| capability.name() == name),
        }
    }

    /// The capability of a library with this file name: `libcuda.so.535.261.03`.
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
