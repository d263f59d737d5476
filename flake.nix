{
  description = "Fused Hopper kernels for diffusion transformers";

  inputs = {
    kernel-builder.url = "github:huggingface/kernels";
  };

  outputs =
    { self, kernel-builder, ... }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;

      # CUDA 12.6 with the assembler (ptxas) of 12.9: docs/releasing.md says why.
      torchVersions =
        versions:
        map (
          version:
          if version.cudaVersion or null == "12.6" then version // { ptxasVersion = "12.9"; } else version
        ) versions;

      pythonCheckInputs =
        pkgs: with pkgs; [
          diffusers
        ];
    };
}
