//! Names, numbers and addresses of GPUs.

use std::ffi::c_char;

use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlPciInfo_t};
use tranche_simulator_machine::description::PciAddress;
use tranche_simulator_machine::identity::{mig_uuid_text, uuid_text};
use tranche_simulator_machine::layout::GpuState;

use crate::code::Code;
use crate::export::{characters, export, get_text, put, put_text};
use crate::mig::visible_devices;
use crate::state::{any_device, by_index, device, device_at, handle, library, mig_handle};

/// The text of fields without a simulated meaning.
const SIMULATED: &str = "SIMULATED";

fn pci(state: &GpuState) -> nvmlPciInfo_t {
    let bus_id = |width: usize| {
        let (domain, bus, device) = (state.pci_domain, state.pci_bus, state.pci_device);
        format!("{domain:0width$X}:{bus:02X}:{device:02X}.0")
    };
    nvmlPciInfo_t {
        busIdLegacy: characters(&bus_id(4)),
        domain: state.pci_domain,
        bus: state.pci_bus,
        device: state.pci_device,
        pciDeviceId: state.pci_device_id,
        pciSubSystemId: state.pci_subsystem_id,
        busId: characters(&bus_id(8)),
    }
}

/// `nvmlPciInfo_t` before its third version, without the long bus id.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct OldPciInfo {
    bus_id: [c_char; 16],
    domain: u32,
    bus: u32,
    device: u32,
    pci_device_id: u32,
    pci_subsystem_id: u32,
    reserved: [u32; 4],
}

fn old_pci(state: &GpuState) -> OldPciInfo {
    let new = pci(state);
    OldPciInfo {
        bus_id: new.busIdLegacy,
        domain: new.domain,
        bus: new.bus,
        device: new.device,
        pci_device_id: new.pciDeviceId,
        pci_subsystem_id: new.pciSubSystemId,
        reserved: [u32::MAX; 4],
    }
}

fn find(matches: impl Fn(&GpuState) -> bool) -> Result<nvmlDevice_t, Code> {
    let library = library()?;
    for gpu in &library.visible {
        let state = &library.shared.gpus[*gpu];
        // NVML initialises GPUs during the search (nvml.h), which fails at a lost one.
        if state.is_lost() {
            return Err(Code::GPU_IS_LOST);
        }
        if matches(state) {
            return Ok(handle(*gpu));
        }
    }
    Err(Code::NOT_FOUND)
}

/// The handle of the MIG device with the UUID `MIG-…`, if the text is one.
fn by_mig_uuid(text: &str) -> Result<Option<nvmlDevice_t>, Code> {
    if !text
        .get(..4)
        .is_some_and(|it| it.eq_ignore_ascii_case("MIG-"))
    {
        return Ok(None);
    }
    for gpu in library()?.visible {
        let device = device_at(gpu)?;
        let devices = visible_devices(device)?;
        let found = devices
            .iter()
            .find(|it| mig_uuid_text(&it.uuid).eq_ignore_ascii_case(text));
        if let Some(it) = found {
            return Ok(Some(mig_handle(gpu, *it)));
        }
    }
    Err(Code::NOT_FOUND)
}

/// The handle of the GPU at a PCI address.
pub fn by_pci(text: &str) -> Result<nvmlDevice_t, Code> {
    let address = PciAddress::parse(text).ok_or(Code::INVALID_ARGUMENT)?;
    find(|gpu| {
        (gpu.pci_domain, gpu.pci_bus, gpu.pci_device)
            == (address.domain, address.bus, address.device)
    })
}

export! {
    fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, to: *mut nvmlDevice_t) {
        let wanted = get_text(uuid)?;
        put(to, match by_mig_uuid(wanted)? {
            Some(handle) => handle,
            None => find(|gpu| uuid_text(&gpu.uuid).eq_ignore_ascii_case(wanted))?,
        })
    }
    fn nvmlDeviceGetHandleByPciBusId(id: *const c_char, to: *mut nvmlDevice_t) {
        put(to, by_pci(get_text(id)?)?)
    }
    fn nvmlDeviceGetHandleByPciBusId_v2(id: *const c_char, to: *mut nvmlDevice_t) {
        put(to, by_pci(get_text(id)?)?)
    }
    fn nvmlDeviceGetHandleBySerial(serial: *const c_char, to: *mut nvmlDevice_t) {
        let wanted = get_text(serial)?;
        put(to, find(|gpu| gpu.serial.as_str() == wanted)?)
    }
    fn nvmlDeviceGetName(of: nvmlDevice_t, name: *mut c_char, length: u32) {
        let any = any_device(of)?;
        let gpu = any.device.state.name.as_str();
        match any.partition {
            None => put_text(name, length, gpu),
            Some(it) => put_text(name, length, &format!("{gpu} MIG {}", it.profile.name(it.gpu_instance.profile))),
        }
    }
    fn nvmlDeviceGetUUID(of: nvmlDevice_t, uuid: *mut c_char, length: u32) {
        let any = any_device(of)?;
        put_text(uuid, length, &match any.partition {
            None => uuid_text(&any.device.state.uuid),
            Some(it) => mig_uuid_text(&it.uuid),
        })
    }
    fn nvmlDeviceGetSerial(of: nvmlDevice_t, serial: *mut c_char, length: u32) {
        put_text(serial, length, device(of)?.state.serial.as_str())
    }
    fn nvmlDeviceGetBoardPartNumber(of: nvmlDevice_t, number: *mut c_char, length: u32) {
        device(of)?;
        put_text(number, length, SIMULATED)
    }
    fn nvmlDeviceGetVbiosVersion(of: nvmlDevice_t, version: *mut c_char, length: u32) {
        device(of)?;
        put_text(version, length, SIMULATED)
    }
    fn nvmlDeviceGetInforomImageVersion(of: nvmlDevice_t, version: *mut c_char, length: u32) {
        device(of)?;
        put_text(version, length, SIMULATED)
    }
    fn nvmlDeviceGetBrand(of: nvmlDevice_t, brand: *mut u32) {
        put(brand, device(of)?.state.brand)
    }
    fn nvmlDeviceGetArchitecture(of: nvmlDevice_t, architecture: *mut u32) {
        put(architecture, device(of)?.state.architecture)
    }
    fn nvmlDeviceGetCudaComputeCapability(of: nvmlDevice_t, major: *mut i32, minor: *mut i32) {
        let [a, b] = device(of)?.state.compute_capability;
        put(major, a.cast_signed())?;
        put(minor, b.cast_signed())
    }
    fn nvmlDeviceGetIndex(of: nvmlDevice_t, index: *mut u32) {
        let any = any_device(of)?;
        let position = match any.partition {
            None => library()?.visible.iter().position(|v| *v == any.device.gpu),
            // nvml.h: the index with which the GPU gives this handle.
            Some(it) => visible_devices(any.device)?.iter().position(|v| v.serial == it.serial),
        }
        .ok_or(Code::UNKNOWN)?;
        put(index, u32::try_from(position).unwrap_or(0))
    }
    fn nvmlDeviceGetMinorNumber(of: nvmlDevice_t, minor: *mut u32) {
        put(minor, device(of)?.state.minor)
    }
    fn nvmlDeviceGetModuleId(of: nvmlDevice_t, module: *mut u32) {
        put(module, device(of)?.state.minor)
    }
    fn nvmlDeviceGetBoardId(of: nvmlDevice_t, board: *mut u32) {
        put(board, device(of)?.state.pci_bus << 8)
    }
    fn nvmlDeviceGetMultiGpuBoard(of: nvmlDevice_t, multi: *mut u32) {
        device(of)?;
        put(multi, 0)
    }
    fn nvmlDeviceGetPciInfo_v3(of: nvmlDevice_t, info: *mut nvmlPciInfo_t) {
        put(info, pci(device(of)?.state))
    }
    fn nvmlDeviceGetPciInfo_v2(of: nvmlDevice_t, info: *mut OldPciInfo) {
        put(info, old_pci(device(of)?.state))
    }
    fn nvmlDeviceGetPciInfo(of: nvmlDevice_t, info: *mut OldPciInfo) {
        put(info, old_pci(device(of)?.state))
    }
    fn nvmlDeviceGetNumGpuCores(of: nvmlDevice_t, cores: *mut u32) {
        let state = device(of)?.state;
        // FP32 cores of one multiprocessor: 128 for 8.6 and later, 64 for earlier ones.
        let [major, minor] = state.compute_capability;
        let each = if major >= 9 || (major == 8 && minor >= 6) { 128 } else { 64 };
        put(cores, state.multiprocessors * each)
    }
    fn nvmlDeviceGetMemoryBusWidth(of: nvmlDevice_t, bits: *mut u32) {
        put(bits, device(of)?.state.memory_bus_bits)
    }
    fn nvmlDeviceGetMaxPcieLinkGeneration(of: nvmlDevice_t, generation: *mut u32) {
        put(generation, device(of)?.state.pcie[0])
    }
    fn nvmlDeviceGetGpuMaxPcieLinkGeneration(of: nvmlDevice_t, generation: *mut u32) {
        put(generation, device(of)?.state.pcie[0])
    }
    fn nvmlDeviceGetCurrPcieLinkGeneration(of: nvmlDevice_t, generation: *mut u32) {
        put(generation, device(of)?.state.pcie[0])
    }
    fn nvmlDeviceGetMaxPcieLinkWidth(of: nvmlDevice_t, lanes: *mut u32) {
        put(lanes, device(of)?.state.pcie[1])
    }
    fn nvmlDeviceGetCurrPcieLinkWidth(of: nvmlDevice_t, lanes: *mut u32) {
        put(lanes, device(of)?.state.pcie[1])
    }
    fn nvmlDeviceValidateInforom(of: nvmlDevice_t) { device(of).map(drop) }
    fn nvmlDeviceOnSameBoard(first: nvmlDevice_t, second: nvmlDevice_t, same: *mut i32) {
        let (first, second) = (device(first)?.gpu, device(second)?.gpu);
        put(same, i32::from(first == second))
    }
}

/// Writes the handle of a GPU by its index, for nvidia-smi's private table.
pub fn handle_by_index(index: u32, to: *mut nvmlDevice_t) -> Result<(), Code> {
    // SAFETY: nvidia-smi passes the address of its handle.
    unsafe { put(to, by_index(index)?) }
}
