//! Divides a GPU, in money and in GPUs, among its holders: the bill of `cost` for one GPU.

use crate::cost::of_gpu;
use crate::model::Gpu;
use crate::money::Money;

/// The parts of an amount that stands for a GPU. They add up to it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AmountParts {
    /// The part of each of [`Gpu::tenants`], in their order; empty where it is not known how they divide it.
    pub tenants: Vec<Money>,
    /// The part that is free and can be allocated.
    pub free: Money,
    /// The part that is free but cannot be allocated.
    pub stranded: Money,
    /// The part that is not offered or not known.
    pub closed: Money,
}

/// A whole GPU, in millionths of it.
pub const GPU: Money = Money::from_micros(1_000_000);

/// Divides this amount among the GPU's holders.
#[must_use]
pub fn parts(gpu: &Gpu, amount: Money) -> AmountParts {
    let bill = of_gpu(gpu, amount);
    let total = bill.total;
    AmountParts {
        tenants: bill.items.iter().map(|item| item.per_hour).collect(),
        free: total.free.0,
        stranded: total.stranded.0,
        closed: total.not_offered.0 + total.unknown.0,
    }
}
