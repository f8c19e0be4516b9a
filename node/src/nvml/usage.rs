//! What NVML reports about a GPU's use and sensors, in the units of [`tranche_api::usage`].

use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::struct_wrappers::device::MemoryInfo;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id as field;
use tranche_api::usage::{Measure, Memory, Sensors, Utilization, WHOLE};
use tranche_nvml::gpm::Gpm;
use tranche_nvml::nvlink::NvLinks;

use super::call::call;
use super::{GpuUse, NvmlError};

/// The metrics of GPM that are utilizations, in percent.
const MEASURES: [(GpmMetricId, Measure); 5] = [
    (GpmMetricId::GraphicsUtil, Measure::GraphicsActive),
    (GpmMetricId::SmUtil, Measure::SmActive),
    (GpmMetricId::SmOccupancy, Measure::SmOccupancy),
    (GpmMetricId::AnyTensorUtil, Measure::TensorActive),
    (GpmMetricId::DramBwUtil, Measure::DramActive),
];

/// The metrics of GPM that are rates of the whole GPU, in MiB per second.
const RATES: [GpmMetricId; 4] = [
    GpmMetricId::PcieTxPerSec,
    GpmMetricId::PcieRxPerSec,
    GpmMetricId::NvlinkTotalTxPerSec,
    GpmMetricId::NvlinkTotalRxPerSec,
];

/// Bytes in the unit of GPM's rates (nvml.h: MiB/sec). The names of nvml-wrapper speak of bytes per second.
const MIB: f64 = 1_048_576.0;

/// A GPU, without its processes and partitions. Only a lost GPU is an error: other values whose call fails are left
/// out.
pub(super) fn of_gpu(
    device: &Device<'_>,
    uuid: &str,
    gpm: &Gpm,
    nvlinks: &NvLinks,
) -> Result<GpuUse, NvmlError> {
    let memory = match call("nvmlDeviceGetMemoryInfo_v2", uuid, device.memory_info()) {
        Err(lost @ NvmlError::GpuLost { .. }) => return Err(lost),
        other => other.ok().as_ref().map(memory_of),
    };
    let mut sensors = sensors(device);
    sensors.nvlink_data = nvlinks.read(device, uuid).ok().flatten();
    let mut utilization = Utilization::default();
    // Not supported in MIG mode.
    if let Ok(rates) = device.utilization_rates() {
        utilization.0.insert(Measure::Gpu, of_percent(rates.gpu));
        utilization
            .0
            .insert(Measure::MemoryCopy, of_percent(rates.memory));
    }
    let metrics: Vec<_> = MEASURES
        .map(|(id, _)| id)
        .into_iter()
        .chain(RATES)
        .collect();
    let found = gpm.read(device, uuid, None, &metrics).unwrap_or_default();
    add_rates(&mut sensors, &found);
    utilization.0.extend(measures(&found));
    Ok(GpuUse {
        memory,
        utilization,
        sensors,
        ..GpuUse::default()
    })
}

fn add_rates(sensors: &mut Sensors, found: &[(GpmMetricId, f64)]) {
    for (id, value) in found {
        let rate = match id {
            GpmMetricId::PcieTxPerSec => &mut sensors.pcie_sent,
            GpmMetricId::PcieRxPerSec => &mut sensors.pcie_received,
            GpmMetricId::NvlinkTotalTxPerSec => &mut sensors.nvlink_sent,
            GpmMetricId::NvlinkTotalRxPerSec => &mut sensors.nvlink_received,
            _ => continue,
        };
        *rate = Some(whole(value * MIB));
    }
}

/// How busy a GPU instance is, if GPM reports it.
pub(super) fn of_instance(device: &Device<'_>, uuid: &str, id: u32, gpm: &Gpm) -> Utilization {
    let metrics = MEASURES.map(|(id, _)| id);
    let found = gpm.read(device, uuid, Some(id), &metrics);
    measures(&found.unwrap_or_default()).collect()
}

/// The memory of a GPU or of a MIG device.
pub(super) fn memory_of(info: &MemoryInfo) -> Memory {
    Memory {
        total: info.total,
        reserved: info.reserved,
        used: info.used,
        free: info.free,
    }
}

fn measures(found: &[(GpmMetricId, f64)]) -> impl Iterator<Item = (Measure, u32)> {
    let measure = |(id, percent): &(GpmMetricId, f64)| {
        let (_, measure) = MEASURES.iter().find(|(known, _)| known == id)?;
        let value = whole(percent * f64::from(WHOLE) / 100.0);
        Some((*measure, u32::try_from(value).unwrap_or(WHOLE).min(WHOLE)))
    };
    found.iter().filter_map(measure)
}

fn sensors(device: &Device<'_>) -> Sensors {
    let fields = [
        field::NVML_FI_DEV_MEMORY_TEMP,
        field::NVML_FI_DEV_REMAPPED_COR,
        field::NVML_FI_DEV_REMAPPED_UNC,
        field::NVML_FI_DEV_REMAPPED_FAILURE,
        field::NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
        field::NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
        field::NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
        field::NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
    ];
    let mut values = device
        .field_values_for(&fields.map(FieldId))
        .unwrap_or_default()
        .into_iter()
        .map(|sample| {
            let value = sample.ok()?.value.ok()?;
            match value {
                SampleValue::U32(value) => Some(u64::from(value)),
                SampleValue::U64(value) => Some(value),
                SampleValue::I64(value) => u64::try_from(value).ok(),
                SampleValue::F64(_) => None,
            }
        });
    let mut next = || values.next().flatten();
    Sensors {
        memory_temperature: next().and_then(|value| u32::try_from(value).ok()),
        remapped_correctable: next(),
        remapped_uncorrectable: next(),
        remap_failed: next().map(|value| value != 0),
        nvlink_flit_errors: next(),
        nvlink_data_errors: next(),
        nvlink_replays: next(),
        nvlink_recoveries: next(),
        sm_clock: device.clock_info(Clock::SM).ok(),
        memory_clock: device.clock_info(Clock::Memory).ok(),
        temperature: device.temperature(TemperatureSensor::Gpu).ok(),
        power: device.power_usage().ok(),
        energy: device.total_energy_consumption().ok(),
        pcie_replays: device.pcie_replay_counter().ok(),
        encoder: device.encoder_utilization().ok().map(|it| it.utilization),
        decoder: device.decoder_utilization().ok().map(|it| it.utilization),
        // Rates are read elsewhere.
        ..Sensors::default()
    }
}

/// Hundredths of a percent.
pub(crate) fn of_percent(percent: u32) -> u32 {
    percent.min(100) * (WHOLE / 100)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "finite, and what is negative becomes 0"
)]
fn whole(value: f64) -> u64 {
    value.round() as u64
}
