//! What a GPU stands for, in money and in GPUs, among those who hold parts of it: the bill of `cost`, of one GPU.

use crate::cost::of_gpu;
use crate::model::Gpu;
use crate::money::Money;

/// The parts of an amount that a GPU stands for. They sum to it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// Of each of [`Gpu::tenants`], in their order; none where it is not known how they divide it.
    pub tenants: Vec<Money>,
    /// Of what is free and can be had.
    pub free: Money,
    /// Of what is free and cannot be had.
    pub stranded: Money,
    /// Of what is not offered, and of what is not known.
    pub closed: Money,
}

/// A whole GPU, in millionths of it.
pub const GPU: Money = Money::from_micros(1_000_000);

/// How those who hold parts of a GPU divide this amount.
#[must_use]
pub fn parts(gpu: &Gpu, amount: Money) -> Parts {
    let bill = of_gpu(gpu, amount);
    let total = bill.total;
    Parts {
        tenants: bill.items.iter().map(|item| item.per_hour).collect(),
        free: total.free.0,
        stranded: total.stranded.0,
        closed: total.not_offered.0 + total.unknown.0,
    }
}
