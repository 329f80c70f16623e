//! Kernels that are written in CUDA C++, for instructions that CubeCL does not have. All such text lies in this folder:
//! [`hopper`] has the products and the attention of one generation of cards, [`decoder`] a transformer block in one launch.
//!
//! CubeCL compiles a shell for such a kernel, which has its number of units and its shared memory; then the text takes the
//! place of the shell's.

use cubecl::{
    ir::{ElemType, StorageType, UIntKind},
    prelude::*,
    server::Binding,
};
use cubecl_runtime::{
    compiler::{CompilationError, Compiler, CubeTask},
    id::KernelId,
    kernel::{CompiledKernel, CubeKernel, KernelDefinition, KernelMetadata, KernelTask},
    server::ExecutionMode,
};
use std::{fmt::Debug, hash::Hash};

pub mod decoder;
pub mod hopper;

/// What is compiled into a written kernel. Its text depends on nothing else.
pub(crate) trait Written: Clone + Debug + Eq + Hash + Send + Sync + 'static {
    /// Units of a cube.
    const UNITS: u32;

    /// The name of the kernel in its text.
    fn entry(&self) -> &'static str;

    /// Bytes of shared memory.
    fn shared(&self) -> usize;

    /// The CUDA C++.
    fn text(&self) -> String;
}

/// The kernel of a form.
pub(crate) struct WrittenKernel<Form>(pub(crate) Form);

impl<Form: Written> KernelMetadata for WrittenKernel<Form> {
    fn id(&self) -> KernelId {
        KernelId::new::<Self>().cube_dim(CubeDim::new_1d(Form::UNITS)).info(self.0.clone())
    }

    fn address_type(&self) -> StorageType {
        ElemType::UInt(UIntKind::U32).into()
    }
}

impl<Form: Written, Target: Compiler> CubeTask<Target> for WrittenKernel<Form> {
    fn compile(
        &self,
        compiler: &mut Target,
        options: &Target::CompilationOptions,
        mode: ExecutionMode,
        address_type: StorageType,
    ) -> Result<CompiledKernel<Target>, CompilationError> {
        let shell = KernelTask::<Target, Shell>::new(Shell { units: Form::UNITS, shared: self.0.shared() });
        let compiled = shell.compile(compiler, options, mode, address_type)?;
        Ok(CompiledKernel { entrypoint_name: self.0.entry().into(), source: self.0.text(), ..compiled })
    }
}

/// The buffer of an argument.
pub(crate) fn binding<R: Runtime>(arg: ArrayArg<R>) -> Binding {
    match arg {
        ArrayArg::Handle { handle } => handle.handle,
        ArrayArg::Alias { .. } => unreachable!("launches of this crate pass buffers"),
    }
}

/// A kernel that has shared memory and does nothing with it.
struct Shell {
    units: u32,
    shared: usize,
}

impl KernelMetadata for Shell {
    fn id(&self) -> KernelId {
        KernelId::new::<Self>().cube_dim(CubeDim::new_1d(self.units)).info(self.shared)
    }

    fn address_type(&self) -> StorageType {
        ElemType::UInt(UIntKind::U32).into()
    }
}

impl CubeKernel for Shell {
    fn define(&self) -> KernelDefinition {
        let mut builder = KernelBuilder::default();
        AddressType::U32.register(&mut builder.scope);
        reserve::expand(&mut builder.scope, self.shared / 4);
        builder.build(KernelSettings::default().cube_dim(CubeDim::new_1d(self.units)))
    }
}

#[cube]
fn reserve(#[comptime] words: usize) {
    let mut room = SharedMemory::<u32>::new(words);
    room[UNIT_POS as usize] = 0u32;
}
