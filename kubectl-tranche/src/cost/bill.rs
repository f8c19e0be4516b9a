//! The bill: divides each GPU's price among its tenants.

use std::collections::{BTreeMap, BTreeSet};

use tranche_driver::stranded::Shares;

use super::prices::Prices;
use super::split::{Basis, split};
use super::{Dollars, Total};
use crate::model::{AllocatedDevice, Gpu, Model, Room, SharesRoom, SlicesRoom, Tenant};
use crate::money::Money;

/// What one tenant pays for one device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Item<'a> {
    pub tenant: &'a Tenant,
    pub per_hour: Money,
}

#[derive(Clone, Debug, Default)]
pub struct Bill<'a> {
    /// What tenants pay.
    pub items: Vec<Item<'a>>,
    /// Where the money goes.
    pub total: Total,
    /// Products whose price is a default.
    pub default_prices: BTreeMap<String, Dollars>,
    /// Products without a price.
    pub unpriced: BTreeSet<String>,
}

/// Splits the prices of all GPUs.
#[must_use]
pub fn bill<'a>(model: &'a Model, prices: &Prices) -> Bill<'a> {
    let mut bill = Bill::default();
    for (_, gpu) in model.gpus() {
        let Some(found) = prices.of(&gpu.product) else {
            bill.unpriced.insert(gpu.product.clone());
            continue;
        };
        if found.is_default {
            let price = Dollars(found.price);
            bill.default_prices.insert(gpu.product.clone(), price);
        }
        bill.add(gpu, found.price);
    }
    let held = bill.items.iter().map(|item| item.per_hour).sum();
    bill.total.held = Dollars(held);
    bill
}

/// Splits the price of one GPU.
#[must_use]
pub fn of_gpu(gpu: &Gpu, price: Money) -> Bill<'_> {
    let mut bill = Bill::default();
    bill.add(gpu, price);
    bill
}

impl<'a> Bill<'a> {
    fn add(&mut self, gpu: &'a Gpu, price: Money) {
        let total = &mut self.total;
        total.all.0 = total.all.0 + price;
        match &gpu.room {
            Room::All => total.free.0 = total.free.0 + price,
            Room::NotOffered => total.not_offered.0 = total.not_offered.0 + price,
            Room::Unknown => total.unknown.0 = total.unknown.0 + price,
            Room::Nothing | Room::Places { .. } => {
                let tenants: Vec<&Tenant> = gpu.tenants().collect();
                self.among(&tenants, price, Basis::Equal, Shares::default());
            }
            Room::Shares(room) => {
                let tenants: Vec<&Tenant> = gpu.tenants().collect();
                self.among(&tenants, price, sizes(room), stranded(room));
            }
            Room::Slices(room) => self.partitions(gpu, price, room),
        }
    }

    fn among(&mut self, tenants: &[&'a Tenant], price: Money, basis: Basis, stranded: Shares) {
        let held: Vec<Shares> = tenants.iter().map(|tenant| share(tenant)).collect();
        let parts = split(price, basis, &held, stranded);
        let items = tenants.iter().zip(parts.holders);
        self.items
            .extend(items.map(|(tenant, per_hour)| Item { tenant, per_hour }));
        self.total.free.0 = self.total.free.0 + parts.free;
        self.total.stranded.0 = self.total.stranded.0 + parts.stranded;
    }

    /// Each partition has its part of the GPU's price, and the shares of a partition divide that part.
    fn partitions(&mut self, gpu: &'a Gpu, price: Money, room: &SlicesRoom) {
        let slices = |count: u32| Shares {
            cores: count.into(),
            ..Shares::default()
        };
        let held: Vec<(&AllocatedDevice, Vec<&Tenant>)> = gpu
            .held
            .iter()
            .map(|held| (held, held.holders().collect()))
            .filter(|(_, tenants): &(_, Vec<_>)| !tenants.is_empty())
            .collect();
        let parts: Vec<Shares> = held
            .iter()
            .map(|(held, _)| slices(held.compute_slices.unwrap_or_default().into()))
            .collect();
        let parts = split(
            price,
            Basis::ComputeSlices(room.compute),
            &parts,
            slices(room.stranded_compute),
        );
        self.total.free.0 = self.total.free.0 + parts.free;
        self.total.stranded.0 = self.total.stranded.0 + parts.stranded;
        for ((held, tenants), price) in held.into_iter().zip(parts.holders) {
            let basis = held.room.as_ref().map_or(Basis::Equal, sizes);
            let left = held.room.as_ref().map(stranded).unwrap_or_default();
            self.among(&tenants, price, basis, left);
        }
    }
}

fn share(tenant: &Tenant) -> Shares {
    Shares {
        memory: tenant.device.memory.unwrap_or_default(),
        cores: tenant.device.cores.unwrap_or_default(),
        sharers: 1,
    }
}

const fn sizes(room: &SharesRoom) -> Basis {
    Basis::Sizes(Shares {
        memory: room.memory,
        cores: room.cores,
        sharers: room.places,
    })
}

const fn stranded(room: &SharesRoom) -> Shares {
    Shares {
        memory: room.stranded_memory,
        cores: room.stranded_cores,
        sharers: 0,
    }
}
