//! Reads the resources of a command: all lists at the same time, each page by page.

use std::collections::BTreeSet;
use std::fmt::Debug;

use futures::future::{join, join4, join5};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use kube::api::{ListParams, ObjectList, Request};
use kube::{Api, Resource as Object};
use serde::de::DeserializeOwned;
use tranche_api::names::DRIVER;
use tranche_api::{GpuNode, SharingPolicy};

use super::problem::gap_in;
use super::{Cluster, gap};
use crate::snapshot::{Cause, Gap, Resource, Scope, Snapshot};

/// Objects in a page: kubectl's size.
const PAGE: u32 = 500;

/// The ConfigMap with the prices, in the namespace in which Tranche runs.
pub const PRICES: &str = "tranche-prices";

pub(crate) struct List<T> {
    pub(crate) objects: Vec<T>,
    pub(crate) gap: Option<Gap>,
}

impl<T> Default for List<T> {
    fn default() -> Self {
        Self {
            objects: Vec::new(),
            gap: None,
        }
    }
}

impl Cluster {
    /// Reads the resources. It reads the claims and pods of `scope`; where the caller may not list them in all namespaces, it reads
    /// those of the context's namespace, and a gap says so.
    pub async fn read(&self, asked: &[Resource], scope: Scope) -> Snapshot {
        let asked: BTreeSet<Resource> = asked.iter().copied().collect();
        let ours = ListParams::default().fields(&format!("spec.driver={DRIVER}"));
        let all = ListParams::default();
        let is_asked = |resource| asked.contains(&resource);
        let (ours_objects, resource_objects) = join(
            join4(
                self.cluster_wide::<GpuNode>(
                    Resource::GpuNodes,
                    is_asked(Resource::GpuNodes),
                    &all,
                ),
                self.cluster_wide::<SharingPolicy>(
                    Resource::SharingPolicies,
                    is_asked(Resource::SharingPolicies),
                    &all,
                ),
                self.cluster_wide::<Node>(Resource::Nodes, is_asked(Resource::Nodes), &all),
                self.prices(is_asked(Resource::Prices)),
            ),
            join5(
                self.cluster_wide::<ResourceSlice>(
                    Resource::ResourceSlices,
                    is_asked(Resource::ResourceSlices),
                    &ours,
                ),
                self.cluster_wide::<DeviceClass>(
                    Resource::DeviceClasses,
                    is_asked(Resource::DeviceClasses),
                    &all,
                ),
                self.namespaced::<ResourceClaim>(
                    Resource::ResourceClaims,
                    is_asked(Resource::ResourceClaims),
                    &scope,
                ),
                self.namespaced::<Pod>(Resource::Pods, is_asked(Resource::Pods), &scope),
                async {},
            ),
        )
        .await;
        let (gpu_nodes, policies, nodes, prices) = ours_objects;
        let (slices, classes, claims, pods, ()) = resource_objects;
        let is_partial = |gap: &Option<Gap>| gap.as_ref().is_some_and(|gap| gap.is_partial);
        let scope = if is_partial(&claims.gap) || is_partial(&pods.gap) {
            Scope::Namespace(self.namespace.clone())
        } else {
            scope
        };
        let gaps = [
            gpu_nodes.gap,
            policies.gap,
            slices.gap,
            claims.gap,
            classes.gap,
            pods.gap,
            nodes.gap,
            prices.gap,
        ];
        Snapshot {
            asked,
            gpu_nodes: gpu_nodes.objects,
            policies: policies.objects,
            slices: slices.objects,
            claims: claims.objects,
            classes: classes.objects,
            pods: pods.objects,
            nodes: nodes.objects,
            prices: prices.objects.into_iter().next().and_then(|it| it.data),
            gaps: gaps.into_iter().flatten().collect(),
            scope,
        }
    }

    async fn cluster_wide<T>(
        &self,
        resource: Resource,
        is_asked: bool,
        params: &ListParams,
    ) -> List<T>
    where
        T: Object<DynamicType = ()> + Clone + Debug + DeserializeOwned,
    {
        if !is_asked {
            return List::default();
        }
        list(resource, &Api::all(self.client()), params).await
    }

    async fn namespaced<T>(&self, resource: Resource, is_asked: bool, scope: &Scope) -> List<T>
    where
        T: Object<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + Debug
            + DeserializeOwned,
    {
        if !is_asked {
            return List::default();
        }
        let params = ListParams::default();
        let of = |namespace: &str| Api::<T>::namespaced(self.client(), namespace);
        match scope {
            Scope::Namespace(name) => list(resource, &of(name), &params).await,
            Scope::All => {
                let everywhere = list(resource, &Api::all(self.client()), &params).await;
                match &everywhere.gap {
                    Some(gap) if gap.cause == Cause::Forbidden => {
                        let here = list(resource, &of(&self.namespace), &params).await;
                        if here.gap.is_some() {
                            return everywhere;
                        }
                        List {
                            gap: Some(only_here(gap, &self.namespace)),
                            ..here
                        }
                    }
                    _ => everywhere,
                }
            }
        }
    }

    /// A missing ConfigMap is no gap: the default prices apply.
    async fn prices(&self, is_asked: bool) -> List<ConfigMap> {
        let mut read = List::default();
        if is_asked {
            let maps = Api::<ConfigMap>::namespaced(self.client(), &self.system);
            match maps.get_opt(PRICES).await {
                Ok(map) => read.objects.extend(map),
                Err(error) => read.gap = Some(gap(Resource::Prices, &error)),
            }
        }
        read
    }
}

/// The gap of a list that covers one namespace instead of all.
#[must_use]
pub fn only_here(gap: &Gap, namespace: &str) -> Gap {
    let resource = gap.resource;
    Gap {
        resource,
        cause: Cause::Forbidden,
        is_partial: true,
        message: format!(
            "you may not {} {resource} in all namespaces: only those of {namespace} are shown, and GPUs may be fuller than they \
             look; ask an administrator for the right",
            resource.verb()
        ),
    }
}

/// The objects of a kind, page by page.
pub(crate) async fn list<T>(resource: Resource, api: &Api<T>, params: &ListParams) -> List<T>
where
    T: Object + Clone + Debug + DeserializeOwned,
{
    let mut objects = Vec::new();
    let params = params.clone().limit(PAGE);
    let read = Box::pin(each_as(resource, api, params, |it| objects.push(it))).await;
    match read {
        Ok(()) => List { objects, gap: None },
        Err(gap) => List {
            objects: Vec::new(),
            gap: Some(gap),
        },
    }
}

/// Passes the objects of a list to `take`. It keeps at most one page in memory. `T` may have fewer fields than the API's type.
pub(super) async fn each_as<K, T>(
    resource: Resource,
    api: &Api<K>,
    mut params: ListParams,
    mut take: impl FnMut(T),
) -> Result<(), Gap>
where
    K: Object + Clone,
    T: Clone + Debug + DeserializeOwned,
{
    let list = Request::new(api.resource_url());
    let client = api.clone().into_client();
    loop {
        let request = list.list(&params).map_err(kube::Error::BuildRequest);
        let response = match request {
            Ok(request) => client.request::<ObjectList<T>>(request).await,
            Err(error) => Err(error),
        };
        let page = response.map_err(|error| gap_in(resource, api.namespace(), &error))?;
        page.items.into_iter().for_each(&mut take);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params.continue_token = Some(token),
            None => return Ok(()),
        }
    }
}
