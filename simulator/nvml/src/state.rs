//! The initialised library, and the handles of GPUs.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use nvml_wrapper_sys::bindings::nvmlDevice_t;
use tranche_simulator_machine::layout::GpuState;
use tranche_simulator_machine::partitions::ComputeInstanceView;
use tranche_simulator_machine::{
    Access, AttachError, Attachment, DriverRoot, LibraryVersion, MAX_GPUS, Shared,
};

use crate::code::Code;
use crate::export::{export, put};
use crate::handles::{Kind, Target, handle_of, target_of};

#[derive(Debug, Clone)]
pub struct Library {
    pub root: DriverRoot,
    pub shared: &'static Shared,
    /// The GPUs that this process can see, as indices into the page.
    pub visible: Vec<usize>,
    /// The device nodes, open until the last shutdown.
    _nodes: Arc<Vec<OwnedFd>>,
}

/// A GPU behind a handle.
#[derive(Debug, Clone, Copy)]
pub struct Device {
    pub gpu: usize,
    pub state: &'static GpuState,
    pub shared: &'static Shared,
}

static LIBRARY: RwLock<Option<Library>> = RwLock::new(None);
static USERS: Mutex<u32> = Mutex::new(0);

/// Handles are addresses in this array. Its values have no meaning.
static HANDLES: [u64; MAX_GPUS] = [0; MAX_GPUS];

pub fn library() -> Result<Library, Code> {
    let library = LIBRARY.read().unwrap_or_else(PoisonError::into_inner);
    library.clone().ok_or(Code::UNINITIALIZED)
}

/// The handle of a GPU.
pub fn handle(gpu: usize) -> nvmlDevice_t {
    (&raw const HANDLES[gpu]).cast_mut().cast()
}

/// A GPU or a MIG device behind a handle.
#[derive(Debug, Clone, Copy)]
pub struct AnyDevice {
    /// The GPU, or the GPU of the MIG device.
    pub device: Device,
    /// The compute instance of a MIG device.
    pub partition: Option<ComputeInstanceView>,
}

/// The handle of a MIG device.
pub fn mig_handle(gpu: usize, it: ComputeInstanceView) -> nvmlDevice_t {
    handle_of(Target {
        kind: Kind::Device,
        gpu,
        instance: it.gpu_instance.id as usize,
        compute: it.id as usize,
        serial: it.serial,
    })
    .cast()
}

/// The GPU or the MIG device of a handle; an error if the GPU has fallen off the bus.
pub fn any_device(handle: nvmlDevice_t) -> Result<AnyDevice, Code> {
    let Some(target) = target_of(handle.cast(), Kind::Device) else {
        let device = gpu_of(handle)?;
        return Ok(AnyDevice {
            device,
            partition: None,
        });
    };
    let (device, it) = find_compute_instance(target)?;
    Ok(AnyDevice {
        device,
        partition: Some(it),
    })
}

/// The compute instance for which a handle was made.
pub fn find_compute_instance(target: Target) -> Result<(Device, ComputeInstanceView), Code> {
    let device = device_at(target.gpu)?;
    let instance = device.state.gpu_instance(target.instance);
    let found = instance
        .and_then(|of| device.state.compute_instance(of, target.compute))
        .filter(|it| it.serial == target.serial)
        .ok_or(Code::INVALID_ARGUMENT)?;
    Ok((device, found))
}

/// The GPU of a handle, which may be that of one of its MIG devices.
pub fn device_of_any(handle: nvmlDevice_t) -> Result<Device, Code> {
    any_device(handle).map(|any| any.device)
}

/// The GPU of a handle; an error if it has fallen off the bus. Functions that use it are not supported for MIG devices.
pub fn device(handle: nvmlDevice_t) -> Result<Device, Code> {
    let any = any_device(handle)?;
    match any.partition {
        Some(_) => Err(Code::NOT_SUPPORTED),
        None => Ok(any.device),
    }
}

fn gpu_of(handle: nvmlDevice_t) -> Result<Device, Code> {
    let offset = (handle as usize).wrapping_sub((&raw const HANDLES) as usize);
    if !offset.is_multiple_of(size_of::<u64>()) {
        library()?;
        return Err(Code::INVALID_ARGUMENT);
    }
    device_at(offset / size_of::<u64>())
}

/// The GPU with this index in the page, if this process can see it.
pub fn device_at(gpu: usize) -> Result<Device, Code> {
    let library = library()?;
    if !library.visible.contains(&gpu) {
        return Err(Code::INVALID_ARGUMENT);
    }
    let state = &library.shared.gpus[gpu];
    if let Some(code) = tranche_simulator_machine::faults::inject_for(state.minor) {
        return Err(Code(code));
    }
    if state.is_lost() {
        return Err(Code::GPU_IS_LOST);
    }
    Ok(Device {
        gpu,
        state,
        shared: library.shared,
    })
}

/// The driver's version, which `install-root` writes into the library that it installs. It is in `.data`, because a file
/// has no bytes for `.bss`.
#[unsafe(no_mangle)]
#[unsafe(link_section = ".data")]
pub static SIM_DRIVER_VERSION: LibraryVersion = LibraryVersion::new();

impl Library {
    fn open() -> Result<Self, Code> {
        let root = DriverRoot::of_library(&HANDLES);
        let mut nodes = vec![root.open_node("nvidiactl").ok_or(Code::DRIVER_NOT_LOADED)?];
        let attachment = Attachment::new(&root, Access::Observe).map_err(|error| match error {
            AttachError::Mismatch => Code::LIB_RM_VERSION_MISMATCH,
            _ => Code::DRIVER_NOT_LOADED,
        })?;
        let shared = attachment.shared();
        let kernel = shared.header.driver_version.as_str();
        if SIM_DRIVER_VERSION.compared_with(kernel).is_ne() {
            return Err(Code::LIB_RM_VERSION_MISMATCH);
        }
        let mut visible = Vec::new();
        for (gpu, state) in shared.gpus().iter().enumerate() {
            // The node of a GPU stays when its driver changes; opening it fails then.
            let node = state
                .is_bound()
                .then(|| root.open_node(&format!("nvidia{}", state.minor)));
            if let Some(node) = node.flatten() {
                nodes.push(node);
                visible.push(gpu);
            }
        }
        Ok(Self {
            root,
            shared,
            visible,
            _nodes: Arc::new(nodes),
        })
    }
}

fn initialise() -> Result<(), Code> {
    let mut users = USERS.lock().unwrap_or_else(PoisonError::into_inner);
    if *users == 0 {
        let library = Library::open()?;
        *LIBRARY.write().unwrap_or_else(PoisonError::into_inner) = Some(library);
    }
    *users += 1;
    Ok(())
}

export! {
    fn nvmlInit() { initialise() }
    fn nvmlInit_v2() { initialise() }
    fn nvmlInitWithFlags(_flags: u32) { initialise() }
    fn nvmlShutdown() {
        let mut users = USERS.lock().unwrap_or_else(PoisonError::into_inner);
        *users = users.checked_sub(1).ok_or(Code::UNINITIALIZED)?;
        if *users == 0 {
            *LIBRARY.write().unwrap_or_else(PoisonError::into_inner) = None;
        }
        Ok(())
    }
    fn nvmlDeviceGetCount_v2(count: *mut u32) {
        put(count, u32::try_from(library()?.visible.len()).unwrap_or(0))
    }
    fn nvmlDeviceGetCount(count: *mut u32) {
        put(count, u32::try_from(library()?.visible.len()).unwrap_or(0))
    }
    fn nvmlDeviceGetHandleByIndex_v2(index: u32, device: *mut nvmlDevice_t) {
        by_index(index).and_then(|handle| put(device, handle))
    }
    fn nvmlDeviceGetHandleByIndex(index: u32, device: *mut nvmlDevice_t) {
        by_index(index).and_then(|handle| put(device, handle))
    }
}

/// The handle of the GPU with this process's index `index`.
pub fn by_index(index: u32) -> Result<nvmlDevice_t, Code> {
    let library = library()?;
    let gpu = library.visible.get(index as usize);
    let gpu = *gpu.ok_or(Code::INVALID_ARGUMENT)?;
    if library.shared.gpus[gpu].is_lost() {
        return Err(Code::GPU_IS_LOST);
    }
    Ok(handle(gpu))
}
