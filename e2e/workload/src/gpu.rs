//! The driver API: a device with its primary context, and memory on it.
//!
//! cudarc's safe layer zeroes memory that it allocates, which would touch every byte of an 80 GB GPU. So this module calls the layer
//! below it. Only this module and `kernel` have unsafe code.
#![allow(unsafe_code)]

use std::sync::Arc;

use anyhow::{Context, bail};
use clap::ValueEnum;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::{CudaContext, CudaStream, sys};
use serde::Serialize;

use crate::amount::Amount;

/// The driver's call that allocates memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// `cuMemAlloc`
    Device,
    /// `cuMemAllocAsync`
    Async,
    /// `cuMemAllocManaged`
    Managed,
}

/// A device with its primary context.
#[derive(Clone, Debug)]
pub struct Gpu {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
}

/// Why an allocation failed.
#[derive(Debug)]
pub enum Refusal {
    /// `CUDA_ERROR_OUT_OF_MEMORY`: no memory is left.
    OutOfMemory,
    /// Any other error.
    Other(DriverError),
}

/// The number of devices. If the driver does not start, the error names the driver's own error.
pub fn count() -> anyhow::Result<usize> {
    // SAFETY: looks for the library by name and opens it; its initialisers are the driver's own.
    if !unsafe { sys::is_culib_present() } {
        bail!("there is no libcuda.so here: does the container have a claim for a GPU?");
    }
    result::init().map_err(named).context("cuInit")?;
    let count = result::device::get_count()
        .map_err(named)
        .context("cuDeviceGetCount")?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// The driver's error by its name in the header.
pub fn named(error: DriverError) -> anyhow::Error {
    anyhow::anyhow!("{:?}", error.0)
}

impl Gpu {
    /// Opens the device `ordinal`.
    pub fn open(ordinal: usize) -> anyhow::Result<Self> {
        let devices = count()?;
        if ordinal >= devices {
            bail!("there is no device {ordinal}, only {devices}");
        }
        let context = CudaContext::new(ordinal)
            .map_err(named)
            .with_context(|| format!("retaining the context of device {ordinal}"))?;
        let stream = context.default_stream();
        Ok(Self { context, stream })
    }

    /// Opens the named device, or every one.
    pub fn open_all(only: Option<usize>) -> anyhow::Result<Vec<Self>> {
        match only {
            Some(ordinal) => Ok(vec![Self::open(ordinal)?]),
            None => (0..count()?).map(Self::open).collect(),
        }
    }

    /// Its number within this process.
    pub fn ordinal(&self) -> usize {
        self.context.ordinal()
    }

    /// `GPU-…`, as NVML and nvidia-smi print it.
    pub fn uuid(&self) -> anyhow::Result<String> {
        let raw = self
            .context
            .uuid()
            .map_err(named)
            .context("cuDeviceGetUuid")?;
        let uuid = uuid::Uuid::from_bytes(raw.bytes.map(i8::cast_unsigned));
        Ok(format!("GPU-{uuid}"))
    }

    /// Its product name.
    pub fn name(&self) -> anyhow::Result<String> {
        self.context
            .name()
            .map_err(named)
            .context("cuDeviceGetName")
    }

    /// `cuDeviceTotalMem`, bytes.
    pub fn total(&self) -> anyhow::Result<u64> {
        let total = self
            .context
            .total_mem()
            .map_err(named)
            .context("cuDeviceTotalMem")?;
        Ok(total as u64)
    }

    /// The multiprocessors that this process can use.
    pub fn multiprocessors(&self) -> anyhow::Result<u32> {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let count = self
            .context
            .attribute(attribute)
            .map_err(named)
            .context("cuDeviceGetAttribute")?;
        u32::try_from(count).context("CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT")
    }

    /// `cuMemGetInfo`: free and total, bytes.
    pub fn memory(&self) -> anyhow::Result<(u64, u64)> {
        let (free, total) = self
            .context
            .mem_get_info()
            .map_err(named)
            .context("cuMemGetInfo")?;
        Ok((free as u64, total as u64))
    }

    /// A stream other than the default one.
    pub fn new_stream(&self) -> anyhow::Result<Arc<CudaStream>> {
        let stream = self.context.new_stream();
        stream.map_err(named).context("cuStreamCreate")
    }

    /// Takes memory; its content is undefined.
    pub fn take(&self, amount: Amount, way: Way) -> Result<Memory, Refusal> {
        let refused = |error: DriverError| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Refusal::OutOfMemory,
            _ => Refusal::Other(error),
        };
        // No address space has room for it: the driver would give the same error.
        let Ok(len) = usize::try_from(amount.0) else {
            return Err(Refusal::OutOfMemory);
        };
        self.context.bind_to_thread().map_err(refused)?;
        // SAFETY: a context is current; what is returned is freed once, by `Memory`'s drop, by the
        // call that belongs to the way.
        let address = unsafe {
            match way {
                Way::Device => result::malloc_sync(len),
                Way::Async => result::malloc_async(self.stream.cu_stream(), len),
                Way::Managed => {
                    result::malloc_managed(len, sys::CUmemAttach_flags_enum::CU_MEM_ATTACH_GLOBAL)
                }
            }
        }
        .map_err(refused)?;
        let memory = Memory {
            gpu: self.clone(),
            address,
            len,
            way,
        };
        // Whether an asynchronous allocation succeeded is known when the stream has executed it.
        self.context.synchronize().map_err(refused)?;
        Ok(memory)
    }
}

impl Refusal {
    /// Converts it into an error of the program, where the allocation must succeed.
    pub fn into_error(self) -> anyhow::Error {
        match self {
            Self::OutOfMemory => anyhow::anyhow!("CUDA_ERROR_OUT_OF_MEMORY"),
            Self::Other(error) => named(error),
        }
    }
}

/// Memory on a device, freed when dropped.
#[derive(Debug)]
pub struct Memory {
    gpu: Gpu,
    address: sys::CUdeviceptr,
    len: usize,
    way: Way,
}

impl Memory {
    /// Its size, bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Writes `bytes` at `at`.
    pub fn write(&mut self, at: usize, bytes: &[u8]) -> anyhow::Result<()> {
        let address = self.place(at, bytes.len())?;
        // SAFETY: `place` has checked that the range lies within this allocation.
        unsafe { result::memcpy_htod_sync(address, bytes) }
            .map_err(named)
            .context("cuMemcpyHtoD")
    }

    /// Reads `len` bytes from `at`.
    pub fn read(&self, at: usize, len: usize) -> anyhow::Result<Vec<u8>> {
        let address = self.place(at, len)?;
        let mut bytes = vec![0; len];
        // SAFETY: `place` has checked that the range lies within this allocation.
        unsafe { result::memcpy_dtoh_sync(&mut bytes, address) }
            .map_err(named)
            .context("cuMemcpyDtoH")?;
        Ok(bytes)
    }

    /// Copies the first `len` bytes of `from`, on the device.
    pub fn copy(&mut self, from: &Self, len: usize) -> anyhow::Result<()> {
        let (to, from) = (self.place(0, len)?, from.place(0, len)?);
        // SAFETY: `place` has checked that both ranges lie within their allocations, and the allocations differ because `self` is
        // borrowed mutably.
        unsafe { result::memcpy_dtod_sync(to, from, len) }
            .map_err(named)
            .context("cuMemcpyDtoD")
    }

    /// The address of `at`, with a context current, if `len` bytes from there are ours.
    fn place(&self, at: usize, len: usize) -> anyhow::Result<sys::CUdeviceptr> {
        match at.checked_add(len) {
            Some(end) if end <= self.len => {}
            _ => bail!(
                "bytes {at} to {at} + {len} are not within {} bytes",
                self.len
            ),
        }
        self.gpu
            .context
            .bind_to_thread()
            .map_err(named)
            .context("cuCtxSetCurrent")?;
        Ok(self.address + at as sys::CUdeviceptr)
    }

    /// Frees it, and reports an error of the driver.
    pub fn free(mut self) -> anyhow::Result<()> {
        self.release().map_err(named).context("freeing memory")
    }

    fn release(&mut self) -> Result<(), DriverError> {
        let address = std::mem::take(&mut self.address);
        if address == 0 {
            return Ok(());
        }
        self.gpu.context.bind_to_thread()?;
        // SAFETY: the address came from the call of the same way and is forgotten here.
        unsafe {
            match self.way {
                Way::Async => result::free_async(address, self.gpu.stream.cu_stream())?,
                Way::Device | Way::Managed => result::free_sync(address)?,
            }
        }
        self.gpu.context.synchronize()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Err(error) = self.release() {
            eprintln!("tranche-workload: freeing memory: {:?}", error.0);
        }
    }
}
