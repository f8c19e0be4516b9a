//! What a GPU stands for, in money and in GPUs, among those who hold parts of it: the bill of `cost`, of one GPU.

use tranche_driver::cost::{Money, Prices, key};

use crate::cost::bill;
use crate::model::{Gpu, Model, Node};

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

/// A GPU's price for an hour.
#[must_use]
pub fn cost(gpu: &Gpu, prices: &Prices) -> Parts {
    let model = Model {
        nodes: vec![Node {
            gpus: vec![gpu.clone()],
            ..Node::default()
        }],
        ..Model::default()
    };
    let bill = bill(&model, prices);
    let total = bill.total;
    Parts {
        tenants: bill.items.iter().map(|item| item.per_hour).collect(),
        free: total.free.0,
        stranded: total.stranded.0,
        closed: total.not_offered.0 + total.unknown.0,
    }
}

/// One GPU, of which a million are a whole one.
#[must_use]
pub fn gpus(gpu: &Gpu) -> Parts {
    let one = [(key(&gpu.product), "1".to_owned())].into();
    let (one, _) = Prices::read(&one);
    cost(gpu, &one)
}
